"""What `pip install` does around CMake: reads the environment, checks the tools, shows the plan.

The build itself is defined in CMakeLists.txt only. Nothing here imports torch.
"""


class BuildError(Exception):
    """The build cannot go on; the message says why and what to do about it."""
