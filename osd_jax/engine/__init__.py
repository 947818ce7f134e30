"""The host's side of decoding: admits requests, chooses K and swaps drafts."""
