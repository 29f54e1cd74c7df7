"""Rewrites JSON schemas into schemas that the library llguidance can enforce.

llguidance knows no negation, no conditions and no unevaluated properties, and it does not always notice that it cannot
enforce a schema. The rewritten schema has only keywords that llguidance enforces exactly. A reply that follows it also
follows the given schema. `rewrite` raises Unsupported if it cannot write such a schema.
"""

from engine.text.json_schema.references import Unsupported
from engine.text.json_schema.rewrite import rewrite

__all__ = ["Unsupported", "rewrite"]
