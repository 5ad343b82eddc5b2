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

Actions = _C.Actions
Arena = _C.Arena
Boundary = _C.Boundary
BoundaryForm = _C.BoundaryForm
PythonWorkers = _C.PythonWorkers
Kernel = _C.Kernel
Layout = _C.Layout
LoweredSegment = _C.LoweredSegment
ProgramPair = _C.ProgramPair
Pipeline = _C.Pipeline
Channels = _C.Channels
Plan = _C.Plan
Port = _C.Port
ProgramWithPorts = _C.ProgramWithPorts
Program = _C.Program
Resizing = _C.Resizing
PythonSegment = _C.PythonSegment
GraphReport = _C.GraphReport
InferenceStream = _C.InferenceStream
Role = _C.Role
Segment = _C.Segment
Snapshot = _C.Snapshot
StagePlan = _C.StagePlan
Value = _C.Value
ActiveRuns = _C.ActiveRuns
Capture = _C.Capture
build_info = _C.build_info
"""``build_info() -> dict[str, str]`` returns the torch, CUDA, GPU architectures and compiler of the build."""

run_backward = _C.run_backward
built_with_cuda = _C.built_with_cuda
"""``built_with_cuda() -> bool`` returns whether the extension contains its GPU code."""

operator_settings = _C.operator_settings
restore_operator_settings = _C.restore_operator_settings
kept_bytes = _C.kept_bytes
alignment_of = _C.alignment_of
place = _C.place
route = _C.route
make_channels = getattr(_C, "make_channels", None)  # None without torch.distributed
all_settings = _C.all_settings
