"""Many ranks: the processes, what they sum, and when gradients are reduced."""
