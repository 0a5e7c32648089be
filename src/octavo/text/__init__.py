"""Text: tokenizer, chat template, incremental detokenizer, stop strings. Knows no requests, no engine and no HTTP."""
