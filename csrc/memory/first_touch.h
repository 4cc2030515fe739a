// Memory that was never accessed has no pages: the kernel finds and zeroes a page at the first access (touch). If a
// read into such memory is submitted, the kernel does this inside the submission, on the worker's thread. It takes
// longer than a fast drive takes to fill the page, and much longer in a virtual machine that has returned its free
// memory to the host.
#pragma once

#include <cstdint>

namespace tensorferry {

// Whether some page of a range is missing. Costs one system call for each 64 MiB.
bool is_untouched(const char* memory, uint64_t nbytes);

// Populate all pages of a range for writing, keeping their contents. This has no effect where the kernel cannot do it
// (before Linux 5.14, out of memory, or a range that is not mapped). A later access to the memory then adds the pages,
// or reports the error.
void touch(char* memory, uint64_t nbytes);

}  // namespace tensorferry
