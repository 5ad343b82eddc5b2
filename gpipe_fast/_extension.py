"""The only file that imports the compiled extension, which also registers torch.ops.gpipe_fast."""

from pathlib import Path

import torch  # must come first: loads the libraries that the extension links against

_HOW_TO_BUILD = "run `make` in the source tree, or `pip install --no-build-isolation .`"

try:
    import gpipe_fast._C as _C
except ImportError as error:
    raise ImportError(
        f"gpipe_fast's C++ extension does not load under torch {torch.__version__}: {error} (searched in "
        f"{Path(__file__).parent}); {_HOW_TO_BUILD}. After `pip install`, start Python outside the source "
        "tree, which has no compiled extension"
    ) from error

# An extension built against another torch may load and then misbehave, because class layouts differ. So a
# mismatch raises here, before any other name is read. Only major.minor must match.
if _C.build_info()["torch"].split(".")[:2] != torch.__version__.split(".")[:2]:
    raise ImportError(
        f"gpipe_fast's C++ extension was built against torch {_C.build_info()['torch']}, "
        f"but this is torch {torch.__version__}; {_HOW_TO_BUILD}"
    )

# Its names are those of gpipe_fast/_C.pyi.
from gpipe_fast._C import *  # noqa: E402, F403

if not hasattr(_C, "make_channels"):  # without torch.distributed
    make_channels = None  # type: ignore[assignment]
