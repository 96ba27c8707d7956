"""Files that other users may have a hand in: which are safe to read, and how ours are written.

A file is opened first and checked then, so that nothing can be put in its place between the check
and its use. Only regular files are read: a pipe would make us wait, a device may do anything. Code,
and what decides over code, is only taken from files that nobody but this user and root can write.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

_WRITE_MODE = 0o644  # the umask takes from it; what others may write would not be read again
_FOLDER_MODE = 0o755


class UntrustedFileError(PermissionError):
    """Somebody else than this user and root can write a file or folder."""


def open_regular(
    path: str | os.PathLike[str], *, follow: bool = True, inside: Path | None = None
) -> BinaryIO:
    """Open a regular file for reading.

    Args:
        path: The file.
        follow: Whether ``path`` may be a symbolic link.
        inside: A folder above ``path``; nothing between the two may be a link either, nor become
            one while this looks at it.

    Raises:
        OSError: It cannot be opened, or is a pipe, a device, a folder or, without ``follow``, a
            link.
    """
    # Without O_NONBLOCK a pipe makes us wait for a writer.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    if not follow:
        flags |= getattr(os, "O_NOFOLLOW", 0)
    handle = os.open(path, flags) if inside is None else _open_inside(inside, Path(path), flags)
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def _open_inside(folder: Path, path: Path, flags: int) -> int:
    """Open a file folder by folder, each from the handle of the one above it."""
    if os.open not in os.supports_dir_fd:
        return os.open(path, flags)
    *folders, name = path.relative_to(folder).parts
    of_folder = os.O_RDONLY | os.O_DIRECTORY
    handle = os.open(folder, of_folder)
    try:
        for part in folders:
            above, handle = handle, os.open(part, of_folder | os.O_NOFOLLOW, dir_fd=handle)
            os.close(above)
        return os.open(name, flags | os.O_NOFOLLOW, dir_fd=handle)
    finally:
        os.close(handle)


def distrust(status: os.stat_result, path: str | os.PathLike[str]) -> str | None:
    """Return why others can change a file or folder, and how to mend that; None if they cannot.

    In a folder with the sticky bit others can add files, but not replace those of this user; a
    group that has this user as its only member is nobody else.

    Args:
        status: Of the opened file or the folder.
        path: Where it is, for the text.
    """
    if not hasattr(os, "geteuid"):
        return None
    me = os.geteuid()
    if status.st_uid not in (me, 0):
        owner, mine = _user_name(status.st_uid), _user_name(me)
        return (
            f"{os.fspath(path)} belongs to user {owner}, not to you or root; if you trust what is "
            f"in it: chown -R {mine} {os.fspath(path)}"
        )
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISDIR(status.st_mode) and mode & stat.S_ISVTX:
        return None
    by_group = mode & stat.S_IWGRP and not _is_own_group(me, status.st_gid)
    if by_group or mode & stat.S_IWOTH:
        return (
            f"{os.fspath(path)} can be written by other users (mode {mode:04o}); if you trust what "
            f"is in it: chmod -R go-w {os.fspath(path)}"
        )
    return None


def _user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


@cache
def _is_own_group(uid: int, gid: int) -> bool:
    """Return whether a group is a user's own, of the same name, and has no other member."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except KeyError:
        return False
    alone = set(group.gr_mem) <= {user.pw_name}
    return user.pw_gid == gid and group.gr_name == user.pw_name and alone


def check_folder(path: Path) -> None:
    """Make sure that nobody else can change what is in a folder.

    Raises:
        UntrustedFileError: Others can; how to mend that.
        OSError: There is no such folder.
    """
    _check(os.stat(path), path)


def _check(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    problem = distrust(status, path)
    if problem is not None:
        raise UntrustedFileError(errno.EPERM, problem)


def read_trusted(path: Path) -> bytes:
    """Return the content of a file that nobody but this user and root can write.

    Raises:
        UntrustedFileError: Others can; how to mend that.
        OSError: It cannot be read, is no regular file, or is a link.
    """
    with open_trusted(path) as file:
        return file.read()


def open_trusted(path: Path) -> BinaryIO:
    """Open a file that nobody but this user and root can write.

    Raises:
        UntrustedFileError: Others can; how to mend that.
        OSError: It cannot be read, is no regular file, or is a link.
    """
    file = open_regular(path, follow=False)
    try:
        _check(os.fstat(file.fileno()), path)
    except BaseException:
        file.close()
        raise
    return file


def write_trusted(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all, that others may read if the umask lets them.

    Missing folders are made.

    Raises:
        OSError: It cannot be written.
    """
    make_folder(path.parent)
    temporary = path.with_name(f"{path.name}.{os.urandom(6).hex()}.tmp")
    try:
        # With an opener, nothing that fails after os.open leaves its handle open.
        with open(temporary, "xb", opener=lambda p, f: os.open(p, f, _WRITE_MODE)) as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, in which others cannot write whatever the umask.

    Raises:
        OSError: It cannot be made.
    """
    if path.is_dir():
        return
    if path.parent != path:
        make_folder(path.parent)
    try:
        path.mkdir(_FOLDER_MODE)
    except FileExistsError:
        if not path.is_dir():
            raise
