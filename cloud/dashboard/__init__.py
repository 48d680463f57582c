"""The dashboard: one page about the fleet, live, served by the cloud process on the loopback."""

from triplane.cloud.dashboard.source import DashboardSource, NodeIncident
from triplane.cloud.dashboard.web import application

__all__ = ["DashboardSource", "NodeIncident", "application"]
