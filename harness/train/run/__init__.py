"""The life of one run: opened, kept through failures, ended."""
