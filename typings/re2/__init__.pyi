from typing import Any

class error(Exception): ...

class Options:
    log_errors: bool
    longest_match: bool

def compile(pattern: str, options: Options | None = ...) -> Any: ...
