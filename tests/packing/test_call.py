"""What a model around an encoder hands on."""

from __future__ import annotations

import torch
from transformers.modeling_outputs import BaseModelOutput

from composer_speedups.packing.call import _selected_hidden_states


def test_only_the_last_hidden_states_are_selected() -> None:
    last, first = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    slots = torch.tensor([5, 0])
    expected = last.flatten(0, 1)[slots].unsqueeze(0)
    output = _selected_hidden_states(BaseModelOutput(last, hidden_states=(first, last)), slots)
    torch.testing.assert_close(output.last_hidden_state, expected)
    assert output.hidden_states[0] is first
    as_tuple = _selected_hidden_states((last, (first, last)), slots)
    torch.testing.assert_close(as_tuple[0], expected)
    assert as_tuple[1][0] is first
