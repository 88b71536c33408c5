"""The program `outpace`. Until a command has started its work, an interrupt ends the process at once, by the signal."""

import signal


def main() -> None:
    """Run one command and exit."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # otherwise the signal is to be ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from outpace.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
