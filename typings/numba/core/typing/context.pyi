from typing import Any

class BaseContext:
    def resolve_function_type(self, func: Any, args: Any, kws: Any) -> Any: ...
