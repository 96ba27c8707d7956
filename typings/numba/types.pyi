from typing import Any

class Type:
    name: str
    def __init__(self, name: str) -> None: ...
    def __call__(self, *args: Any) -> Any: ...

class Number(Type): ...
class Integer(Number): ...
class Boolean(Type): ...
class Function(Type): ...

int8: Type
int16: Type
int32: Type
int64: Type
uint8: Type
uint16: Type
uint32: Type
uint64: Type
intp: Type
float32: Type
float64: Type
boolean: Type
void: Type
none: Type

def UniTuple(dtype: Any, count: int) -> Any: ...
def Tuple(types: Any) -> Any: ...
