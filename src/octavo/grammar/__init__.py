"""JSON schema, regex, choice, grammar or structural tags -> a matcher of tokens: mask, advance, roll back. Knows no requests' states,
no HTTP and no tensors.

A `GrammarSpec` says what an output must be. `GrammarCompiler` checks it in a process of its own with bounds on time and memory and
returns the *source*: a text that travels to the engine. Beside the engine a `MatcherPool` makes matchers of sources. The work of
both is llguidance's.
"""

from octavo.grammar.spec import CallsSpec, GrammarKind, GrammarSpec, Reasoning, ToolSpec

__all__ = ["CallsSpec", "GrammarKind", "GrammarSpec", "Reasoning", "ToolSpec"]
