"""One process: the identity. Several: a clear refusal, until they are built."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import accumulus as acc
from accumulus.dist import collectives, process, sync


def test_alone_everything_is_the_identity():
    value = torch.ones(3)
    assert collectives.num_ranks() == 1
    for over_ranks in (collectives.sum_over_ranks, collectives.any_over_ranks, collectives.max_over_ranks):
        assert over_ranks(value) is value


def test_several_ranks_are_refused(monkeypatch):
    for module in (collectives, sync):
        monkeypatch.setattr(module, "num_ranks", lambda: 2)
    with pytest.raises(acc.UnsupportedError, match="2 ranks"):
        collectives.sum_over_ranks(1)
    with pytest.raises(acc.UnsupportedError, match="2 ranks"):
        sync.choose_sync(nn.Linear(1, 1))


class Compiled(nn.Module):
    """As torch.compile wraps a model."""

    def __init__(self, model):
        super().__init__()
        self._orig_mod = model


def test_processes_of_torchrun_that_never_met_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(acc.UnsupportedError, match="2 ranks"):
        sync.choose_sync(nn.Linear(1, 1))


def test_wrappers_are_seen_through_compile():
    with pytest.raises(acc.UnsupportedError, match="DataParallel"):
        sync.choose_sync(Compiled(nn.DataParallel(nn.Linear(1, 1))))


def test_torchruns_environment(monkeypatch):
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    found = process.this_process()
    assert (found.rank, found.num_ranks, found.local_rank, found.is_main) == (3, 8, 1, False)


def test_without_it_there_is_one(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert process.this_process().is_main


@pytest.mark.parametrize(("rank", "size"), [("x", "2"), ("2", "2"), ("-1", "2")])
def test_nonsense_in_it(monkeypatch, rank, size):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(acc.UsageError):
        process.this_process()
