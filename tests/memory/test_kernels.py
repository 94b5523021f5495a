"""Workspaces that only kernels know: asked for on few samples, on a line for more, refused where there is no asking."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import accumulus as acc
from accumulus.memory import LiveBytes, kernels
from accumulus.memory.fake import FakeLiveBytes, fake_copy


def kept_by(make_live, layer, inputs):
    with make_live() as live:
        output, _ = layer(inputs)
        kept = live.current_bytes
        output.sum().backward()
    return kept


@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2}, {"bidirectional": True}, {"bias": False, "batch_first": True}]
)
def test_an_lstm_keeps_what_the_real_one_keeps(monkeypatch, options):
    """Also where the size lies on the line through two smaller ones; pages of 4 KiB make that inexact by a few."""
    layer = nn.LSTM(24, 32, **options)
    mode = FakeTensorMode()
    fake = fake_copy(layer, mode, torch.device("cpu"))
    for few_elements, tolerance in ((2**18, 0), (2**16, 0.02)):
        monkeypatch.setattr(kernels, "FEW_ELEMENTS", few_elements)
        for size in (1, 60):
            shape = (size, 50, 24) if options.get("batch_first") else (50, size, 24)
            real = kept_by(LiveBytes, layer, torch.randn(shape))
            with mode:
                assert kept_by(FakeLiveBytes, fake, torch.empty(shape)) == pytest.approx(real, rel=tolerance)


def test_without_gradients_an_lstm_keeps_nothing():
    layer, mode = nn.LSTM(24, 32), FakeTensorMode()
    fake = fake_copy(layer, mode, torch.device("cpu"))
    with torch.no_grad(), LiveBytes() as live:
        kept = layer(torch.randn(5, 3, 24))
    with torch.no_grad(), mode, FakeLiveBytes() as live_fake:
        kept_fake = fake(torch.empty(5, 3, 24))
    assert live.current_bytes == live_fake.current_bytes
    assert kept[0].shape == kept_fake[0].shape


def test_what_cannot_be_known_is_refused():
    with pytest.raises(acc.UnsupportedError, match="only the kernel of _cudnn_rnn knows"):
        kernels.with_workspace("_cudnn_rnn", (), ())
