"""Check of folders from which a later start reads what an earlier one wrote."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def check_private_folder(folder: Path) -> None:
    """Reject a folder in which other users could write.

    Raises:
        PermissionError: the path is not a folder, not this user's, or writable for others.
        OSError: the folder cannot be read.
    """
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise PermissionError(
            f"{folder} must be a folder of this user, without write permission for others"
        )
