"""Reading files that other users may have changed, and writing files safely.

A file is opened and then checked, so that it cannot be replaced between the check and its use. Only
regular files are read: a pipe would block, a device could do anything. Code, and data that code
trusts, is only read from files that nobody but this user and root can write.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, BinaryIO, Self

_WRITE_MODE = 0o644  # reduced by the umask; a file that others can write would not be read again
_FOLDER_MODE = 0o755  # likewise


class UntrustedFileError(PermissionError):
    """A user other than this one and root can write a file or folder."""


def open_regular(
    path: str | os.PathLike[str], *, follow: bool = True, inside: Path | None = None
) -> BinaryIO:
    """Open a regular file for reading.

    Args:
        path: Path of the file.
        follow: Whether ``path`` may be a symbolic link.
        inside: An ancestor folder of ``path``: the folders between the two must not be symbolic
            links either, nor become such during the call. None: they may be.

    Raises:
        OSError: the file cannot be opened, or is a pipe, a device, a folder or, without ``follow``,
            a symbolic link.
    """
    # Without O_NONBLOCK opening a pipe would wait for a writer.
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
    """Open a file folder by folder, each relative to the handle of its parent."""
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
    """Return why other users can change a file or folder, and the remedy; None if they cannot.

    A folder with the sticky bit is trusted: others can add files to it, but not replace those of
    this user. So is a group with this user as its only member.

    Args:
        status: Status of the opened file or the folder.
        path: Its path, for the text.
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
    """Return whether a group is a user's primary one, has the user's name and no other member."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except KeyError:
        return False
    alone = set(group.gr_mem) <= {user.pw_name}
    return user.pw_gid == gid and group.gr_name == user.pw_name and alone


def check_folder(path: Path) -> None:
    """Check that nobody but this user and root can change the files of a folder.

    Raises:
        UntrustedFileError: others can; the message has the remedy.
        OSError: there is no such folder.
    """
    _check(os.stat(path), path)


def _check(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    problem = distrust(status, path)
    if problem is not None:
        raise UntrustedFileError(errno.EPERM, problem)


def read_trusted(path: Path) -> bytes:
    """Return the content of a file that nobody but this user and root can write.

    Raises:
        UntrustedFileError: others can; the message has the remedy.
        OSError: the file cannot be read, is no regular file, or is a symbolic link.
    """
    with open_trusted(path) as file:
        return file.read()


def open_trusted(path: Path) -> BinaryIO:
    """Open a file that nobody but this user and root can write.

    Raises:
        UntrustedFileError: others can; the message has the remedy.
        OSError: the file cannot be read, is no regular file, or is a symbolic link.
    """
    file = open_regular(path, follow=False)
    try:
        _check(os.fstat(file.fileno()), path)
    except BaseException:
        file.close()
        raise
    return file


def write_trusted(path: Path, data: bytes) -> None:
    """Write a file atomically; others may read it if the umask allows. Missing folders are made.

    Raises:
        OSError: the file cannot be written.
    """
    make_folder(path.parent)
    with AtomicFiles(sync=False) as files:
        files.open(path, _WRITE_MODE).write(data)


class AtomicFiles:
    """Files that are renamed to their targets when all are written, and removed on an error."""

    def __init__(self, *, sync: bool = True) -> None:
        """Begin without files.

        Args:
            sync: Whether the files are on the disk before they are renamed. Without this a crash of
                the machine soon afterwards may leave an empty file under the target's name.
        """
        self._sync = sync
        self._open: list[tuple[IO[bytes], Path, Path]] = []

    def open(self, target: Path, mode: int = 0o666) -> IO[bytes]:
        """Return a new temporary file, of this mode less the umask, that becomes ``target``."""
        hidden = target.with_name(f".{target.name}.{os.urandom(8).hex()}.tmp")
        # With an opener, an error after os.open cannot leave the handle open.
        file = open(hidden, "xb", opener=lambda p, f: os.open(p, f, mode))  # noqa: SIM115
        self._open.append((file, hidden, target))
        return file

    def __enter__(self) -> Self:
        """Return the object."""
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Rename the files; after an error, remove them."""
        try:
            if error is None:
                for file, _, _ in self._open:
                    file.flush()
                    if self._sync:
                        os.fsync(file.fileno())
                    file.close()
                # All files are complete before the first is renamed, so that an error while writing
                # leaves all old ones.
                for _, hidden, target in self._open:
                    os.replace(hidden, target)
        finally:
            for file, hidden, _ in self._open:
                with suppress(OSError):  # such as a full disk, which was already reported
                    file.close()
                with suppress(OSError):
                    hidden.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Make a folder and its ancestors, writable only by this user whatever the umask.

    Raises:
        OSError: the folder cannot be made.
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
