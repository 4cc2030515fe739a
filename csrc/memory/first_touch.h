// Memory that nobody has touched yet has no pages: the kernel finds, and zeroes, one at the first touch. For a drive's
// bytes to go there it must do so within the submission, on the thread that drives the queue, and that takes longer
// than a fast drive takes to fill the page (and much longer in a virtual machine that has given its free memory back).
#pragma once

#include <cstdint>

namespace tensorferry {

// Whether some page of a range is not there. One system call for 64 MiB.
bool is_untouched(const char* memory, uint64_t nbytes);

// Has all pages of a range be there, ready to be written to; their bytes stay as they are. Where the kernel cannot
// (before Linux 5.14, no memory, none of the process's), nothing happens: who writes there will find out.
void touch(char* memory, uint64_t nbytes);

}  // namespace tensorferry
