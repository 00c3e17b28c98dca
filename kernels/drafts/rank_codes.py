"""The numbers of `path_ranks`. Column d of a request says how its path of d drafts went on: the
rank of the next child (0 is the first in node order), or END + the number of children, of which
none was accepted."""

END = 64
OFF_CHAIN = 128  # added where a draft before was not its node's first child
NOTHING = -1  # after the path's end
