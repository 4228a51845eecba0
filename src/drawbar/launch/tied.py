"""A launcher, tied to the Drawbar process that starts it: when that is gone, the launcher and so the ranks go too.

`python -m drawbar.launch.tied COMMAND…` becomes COMMAND.
"""

from __future__ import annotations

import os
import sys

from drawbar.launch.last_words import LAUNCHER_PID, TORCHRUN_PID, die_with_parent

if __name__ == "__main__":
    # The wish to die with the parent outlives exec.
    die_with_parent(LAUNCHER_PID)
    if "torch.distributed.run" in sys.argv:
        # Its ranks are its children; those of other launchers may have an agent of theirs between.
        os.environ[TORCHRUN_PID] = str(os.getpid())
    os.execvp(sys.argv[1], sys.argv[1:])
