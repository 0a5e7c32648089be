"""OpenAI's Responses API over chat: items to messages, chunks to events, and a store of what was answered."""
