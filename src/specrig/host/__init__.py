"""The program specrig puts on a rig: standard library only, Python 3.9 or later, shipped as one zipapp.

Everything that must happen next to the weights, the Docker socket or systemd is here: staging and padding models,
pulling an image, starting a unit and waiting until it answers. It makes no decisions; it is told by the plan.
"""

PROGRAM = "/usr/local/lib/specrig/specrig-host"
