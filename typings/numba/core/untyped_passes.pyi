from typing import Any

DeadBranchPrune: Any
FixupArgs: Any
GenericRewrites: Any
IRProcessing: Any
ReconstructSSA: Any
RewriteSemanticConstants: Any
TranslateByteCode: Any
