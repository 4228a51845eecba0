"""torchrun, tied to the Drawbar process that starts it: when that is gone, torchrun and so the ranks go too."""

from __future__ import annotations

from torch.distributed.run import main

from drawbar.launch.last_words import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    main()
