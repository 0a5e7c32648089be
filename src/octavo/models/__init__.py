"""What a model is: spec, the one forward, and families that map checkpoints to specs."""

from octavo.models.decoder import make_forward
from octavo.models.families import find_family
from octavo.models.spec import Family, ModelSpec

__all__ = ["Family", "ModelSpec", "find_family", "make_forward"]
