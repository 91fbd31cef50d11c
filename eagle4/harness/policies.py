"""All policies by name. A new one is one file with a factory (PolicySpec, TreeSpec) -> Policy, and one line here."""

from eagle4.harness.confidence import confidence
from eagle4.harness.marginal import marginal
from eagle4.harness.policy import fixed

POLICIES = {"fixed": fixed, "confidence": confidence, "marginal": marginal}
