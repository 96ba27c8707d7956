from typing import Any

class AOTCodeLibrary:
    _final_module: Any

class AOTCPUCodegen:
    _library_class: type
    _tm: Any
    def __init__(self, module_name: str, cpu_name: str | None = None) -> None: ...
    def _customize_tm_features(self) -> str: ...
    def _customize_tm_options(self, options: dict[str, Any]) -> None: ...
