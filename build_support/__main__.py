"""python -m build_support requirements | directory | build [CMake options]

What the Makefile needs: the packages that pip must add on this machine, the build folder of this
interpreter, and a build of everything in it.
"""

import sys

from . import BuildError, cmake

if __name__ == "__main__":
    command, *options = sys.argv[1:] or ["help"]
    try:
        if command == "requirements":
            from .backend import missing_requirements

            print(*missing_requirements(), sep="\n")
        elif command == "directory":
            print(cmake.DIRECTORY)
        elif command == "build":
            cmake.build(options)
        else:
            sys.exit(__doc__)
    except BuildError as error:
        sys.exit(f"error: {error}")
