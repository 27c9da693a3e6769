"""The plan: every decision about a host, made before the host is touched. Pure."""

from specrig.plan.gateway import GatewayPlan, plan_gateway
from specrig.plan.planner import plan_host, plan_hosts
from specrig.plan.types import HostPlan

__all__ = ["GatewayPlan", "HostPlan", "plan_gateway", "plan_host", "plan_hosts"]
