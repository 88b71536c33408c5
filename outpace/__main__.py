"""The program `outpace`. Until a command has begun something, an interrupt ends it at once, by the signal."""

import signal


def main() -> None:
    """Runs one command and exits."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is to be ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from outpace.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
