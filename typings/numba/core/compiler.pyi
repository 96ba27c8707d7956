from typing import Any

def Flags() -> Any: ...
def compile_extra(
    typingctx: Any,
    targetctx: Any,
    func: Any,
    args: Any,
    return_type: Any,
    flags: Any,
    locals: Any,
    library: Any = None,
) -> Any: ...

class DefaultPassBuilder: ...
