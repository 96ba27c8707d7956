from typing import Any

cpu_target: Any
