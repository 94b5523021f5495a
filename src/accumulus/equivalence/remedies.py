"""What to do about each cause, in one sentence; and by which words a router is known."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

__all__ = ["is_routing"]

MIXING = (
    "Use GroupNorm or LayerNorm in its place, freeze its statistics with .eval() before making the step, or accept "
    "that it normalises each micro-batch by itself, as every rank of a run does that has no SyncBatchNorm."
)
MIXING_ALWAYS = (
    "Look at which dimension it works along, as samples are the first one (a module with batch_first=False mixes them "
    "by mistake); or use one that works by sample, such as GroupNorm in place of batch statistics."
)
MIXING_BEFORE = (
    "Mix samples where the batch is made, so that micro-batches are cut from what is mixed already, and not in the "
    "loss function."
)
RANDOM = (
    "Nothing to do: micro-batches draw other numbers than one batch would, of the same distribution; with draws that "
    "do not depend on the split, the results agree."
)
COMPARISON = (
    "It cannot be accumulated exactly as it is: gather the representations of the whole batch first, take the loss and "
    "its gradient by them once, and run each micro-batch backward from its share (gradient caching)."
)
STATISTIC = (
    "Compute the statistic over the whole batch beforehand and give it to every micro-batch as a field of the batch, "
    "or define the loss by sample; then return acc.Loss with its count."
)
BALANCE = (
    "Use a balance loss by sample or by sequence, keep the running load outside of the loss (loss-free balancing), or "
    "accept that experts are balanced within each micro-batch."
)
PADDING = (
    "Mask padding in every reduction, normalisation and position (positions from the mask's cumulative sum), or pad "
    "every micro-batch to the same length."
)
STATE = (
    "Move what is carried from one forward pass to the next out of the forward pass, and update it once per step, from "
    "on_step= or after the call; or run the module in evaluation mode."
)
STATE_BUFFER = "Update it once per step, from on_step= or after the call, or accept that it counts micro-batches."
NONDETERMINISTIC = (
    "Seed what draws, or call torch.use_deterministic_algorithms(True); until two equal runs agree, nothing else can "
    "be told."
)
UNKNOWN = "Check smaller parts of the model by themselves, and report it if a part that is right is called wrong."

ROUTING = re.compile(r"moe|expert|router|routing|gate|gating|switch|balanc|load", re.IGNORECASE)


def is_routing(model: nn.Module, term: str, where: Sequence[str]) -> bool:
    """Whether what samples meet in belongs to a router: the term, its tensors or the modules around them say so.

    Args:
        model: in which experts are looked for.
        term: name of the loss term.
        where: the tensors.
    """
    if ROUTING.search(term) or any(ROUTING.search(text) for text in where):
        return True
    kinds = {type(module).__name__ for module in model.modules()}
    return any(re.search(r"moe|expert|router", kind, re.IGNORECASE) for kind in kinds) and not where
