"""Anthropic's Messages API over chat: blocks to messages, and chunks to blocks."""
