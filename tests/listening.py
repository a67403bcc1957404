"""How a command of a test hears of signals that this process may have been started to ignore."""

from typing import Final

LISTENING: Final = ("env", "--default-signal=INT,HUP,TERM")
"""As a shell in the foreground starts its children: in the background they ignore Ctrl-C, under nohup SIGHUP."""
