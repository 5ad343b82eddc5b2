"""The folder of compiled kernels; tests/fuse/test_cubins.py tests what it keeps."""

from __future__ import annotations

import pwd
from pathlib import Path
from unittest import mock

import pytest

from gpipe_fast.fuse import cubin_cache
from gpipe_fast.fuse.cubin import Cubin

CUBIN = Cubin(b"image", "kernel", 4, 1, 0, False, False)


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GPIPE_FAST_CACHE", "~/kernels")
    cubin_cache.store("key", CUBIN)
    assert [path.parent for path in tmp_path.rglob("*.cubin")] == [tmp_path / "kernels"]
    assert cubin_cache.load("key") == CUBIN


def test_without_a_home_folder_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A container may run as a user that its system does not know."""
    for name in ("HOME", "XDG_CACHE_HOME", "GPIPE_FAST_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    with mock.patch.object(pwd, "getpwuid", side_effect=KeyError):
        with pytest.warns(UserWarning, match="cannot be kept in ~.* no home folder"):
            cubin_cache.store("key", CUBIN)
        assert cubin_cache.load("key") is None
        cubin_cache.trim()
    assert not list(tmp_path.iterdir())


def test_the_source_of_a_generated_kernel_lies_beside_its_cubin(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(cubin_cache.FOLDER_VARIABLE, str(tmp_path))
    cubin_cache.store("a", CUBIN, "# native_layer_norm\n")
    cubin_cache.store("b", CUBIN)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.cubin", "a.py", "b.cubin"]
    assert (tmp_path / "a.py").read_text() == "# native_layer_norm\n"
    assert cubin_cache.load("a") == CUBIN
    cubin_cache.trim(max_bytes=0)
    assert list(tmp_path.iterdir()) == []
