"""The source of a program that stands for a fork of another process: it passes signals on, and ends with the fork."""

# After `server`, a socket, is connected, and once `ask()` has asked for the fork. The other end sends its process
# number, and how it ended: an exit code, or minus a signal. Nothing comes where the other end was killed.
FOLLOW = """
signals = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
ask()
(fork,) = struct.unpack("<q", server.recv(8))
def hand_on(number, frame):
    try:
        os.kill(fork, number)
    except ProcessLookupError:
        pass  # It has ended already, and its exit code is on its way.
for number in signals:
    signal.signal(number, hand_on)
signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
answer = server.recv(8)
code = struct.unpack("<q", answer)[0] if answer else -signal.SIGKILL
if code < 0:
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""
