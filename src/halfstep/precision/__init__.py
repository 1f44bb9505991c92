"""In which arithmetic forward and backward run, and the loss scale that FP16 needs."""

from halfstep.precision.policy import Policy, policy_for
from halfstep.precision.scaler import LossScaler

__all__ = ["LossScaler", "Policy", "policy_for"]
