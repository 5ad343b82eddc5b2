"""Dynamo's settings and patches: they hold in their blocks alone; and the check of some guards."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch._dynamo.config as dynamo_config
from torch._dynamo.side_effects import SideEffects

from gpipe_fast.torch_private.dynamo import _is_empty_again, effective_changes_only, settings


def test_settings_hold_in_a_block_and_unknown_ones_are_left_out() -> None:
    before = dynamo_config.recompile_limit
    function = logging.getLogger("tests").warning
    with settings({"recompile_limit": before + 5, "no_such_setting": 1}, {function}):
        assert dynamo_config.recompile_limit == before + 5
        assert function in dynamo_config.ignore_logging_functions
    assert dynamo_config.recompile_limit == before
    assert function not in dynamo_config.ignore_logging_functions


def test_patches_of_side_effects_end() -> None:
    before = SideEffects._get_modified_vars
    with effective_changes_only([]):
        assert SideEffects._get_modified_vars is not before
    assert SideEffects._get_modified_vars is before


@pytest.mark.parametrize(
    ("before", "after", "is_empty"), [({}, {}, True), ({}, {"a": 1}, False), ({"a": 1}, {}, False)]
)
def test_a_dict_that_was_filled_is_not_empty_again(before: object, after: object, is_empty: bool) -> None:
    variable = SimpleNamespace(source="source", original_items=before, items=after)
    assert _is_empty_again(variable) == is_empty
    assert not _is_empty_again(SimpleNamespace(original_items={}, items={}))  # made by the forward
