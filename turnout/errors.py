"""The one family of errors that a user can mend.

`UserError` carries a message that names what was wrong and what to do. The command line prints it
without a traceback and exits with code 2; the server answers it as a 4xx. Everything else is a bug
and keeps its traceback.
"""


class UserError(Exception):
    """Something the user asked for or supplied is wrong; the message says what and how to mend it."""
