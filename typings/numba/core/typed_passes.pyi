from typing import Any

IRLegalization: Any
NativeLowering: Any
NoPythonBackend: Any
NopythonTypeInference: Any
PreLowerStripPhis: Any
