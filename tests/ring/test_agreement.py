"""What ranks are told when they differ (the collective itself: test_distributed.py)."""
import pytest
import torch

from ringflash import Layout, Mask
from ringflash.agreement import _compare, _Statement, agree_layout, layout_fields, mask_field, token_of


def _stated(fields, problem=None):
    return _Statement(fields, problem, 0)


def test_equal_statements_give_no_error():
    assert _compare("x", [_stated({"a": "1"}), _stated({"a": "1"})]) == ("", None)


def test_each_difference_names_its_values_and_ranks():
    text, error = _compare("ring_attention", [_stated({"a": "1", "b": "x"}), _stated({"a": "2", "b": "x"}),
                                              _stated({"a": "1", "b": "x"})])
    assert error is ValueError and text == "ring_attention: a differs: 1 on cp ranks 0, 2; 2 on cp rank 1"


def test_a_field_that_one_rank_lacks_is_a_difference():
    text, error = _compare("x", [_stated({}), _stated({"layout.masks[1]": "Mask()"})])
    assert error is ValueError and "layout.masks[1] differs: absent on cp rank 0; Mask() on cp rank 1" in text


def test_refusals_come_first_and_keep_their_class_when_they_share_it():
    refused = _stated({}, ("NotImplementedError", "sinks: no"))
    text, error = _compare("x", [_stated({"a": "1"}), refused, refused])
    assert error is NotImplementedError and text == "x: cp ranks 1, 2: sinks: no"
    text, error = _compare("x", [refused, _stated({}, ("ValueError", "bad"))])
    assert error is ValueError and text == "x: cp rank 0: sinks: no | cp rank 1: bad"
    assert _compare("x", [refused, refused])[0] == "x: sinks: no"


def test_masks_that_print_alike_differ_as_fields():
    long, other = list(range(40)), [0, *range(2, 40), 40]
    other[-1] = 39
    one, two = Mask(cu_seqlens=long), Mask(cu_seqlens=sorted(other))
    assert mask_field(one) != mask_field(two) and mask_field(one) == mask_field(Mask(cu_seqlens=long))


def test_a_token_stands_for_everything_that_was_agreed_on():
    layout = Layout("zigzag", 9, 1, Mask())
    tokens = {agree_layout(layout, None), agree_layout(layout, None, {"dtype": torch.half}), agree_layout(layout, None, 3),
              agree_layout(Layout("zigzag", 8, 1), None), agree_layout(Layout("zigzag", 9, 1, Mask(causal=False)), None)}
    assert len(tokens) == 5
    assert agree_layout(layout, None) == token_of(layout_fields(layout))


def test_a_layout_for_more_ranks_than_the_group_has_is_refused():
    with pytest.raises(ValueError, match="cp_size=2: the group has 1"):
        agree_layout(Layout("zigzag", 9, 2), None)
