"""The plan: every decision about a host, made before the host is touched. Pure."""

from specrig.plan.planner import plan_host, plan_hosts
from specrig.plan.types import HostPlan

__all__ = ["HostPlan", "plan_host", "plan_hosts"]
