"""Speech to text: windows, prompts, rules and segments of models such as Whisper."""
