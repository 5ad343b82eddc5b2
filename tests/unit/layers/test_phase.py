"""The phase of a layer: checkpointing or recomputing, for one thread and within blocks."""

from __future__ import annotations

import threading

from gpipe_fast.layers.phase import is_checkpointing, is_recomputing, phase_scope


def phase() -> tuple[bool, bool]:
    return is_checkpointing(), is_recomputing()


def test_blocks_are_nested() -> None:
    assert phase() == (False, False)
    with phase_scope(checkpointing=True):
        assert phase() == (True, False)
        with phase_scope(recomputing=True):
            assert phase() == (False, True)
        assert phase() == (True, False)
    assert phase() == (False, False)


def test_other_threads_have_a_phase_of_their_own() -> None:
    found = []
    with phase_scope(checkpointing=True):
        thread = threading.Thread(target=lambda: found.append(phase()))
        thread.start()
        thread.join()
    assert found == [(False, False)]
