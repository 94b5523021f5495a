"""Proof that accumulation gives the whole batch's update on the user's own model, or the reason why it does not.

`proof` runs the batch whole and split and compares; `causes` finds out why they differ, by the experiments of
`mixing`, `suspects`, `loss` and `weights`, all of which run copies in a `lab`.
"""

from accumulus.equivalence.report import Cause, Difference, EquivalenceReport, Kind, PrecisionGap, SplitOutcome

__all__ = ["Cause", "Difference", "EquivalenceReport", "Kind", "PrecisionGap", "SplitOutcome"]
