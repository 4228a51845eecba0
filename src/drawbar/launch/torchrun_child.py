"""torchrun, tied to the Drawbar process that starts it: when that is gone, torchrun and so the ranks go too."""

from __future__ import annotations

import os

from drawbar.launch.last_words import LAUNCHER_PID, TORCHRUN_PID, die_with_parent

if __name__ == "__main__":
    # Before torch is imported, which takes seconds in which the launcher may die.
    die_with_parent(LAUNCHER_PID)
    os.environ[TORCHRUN_PID] = str(os.getpid())
    from torch.distributed.run import main

    main()
