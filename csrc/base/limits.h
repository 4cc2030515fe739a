// Find out which system limit made the kernel refuse something, as text for messages. Not all limits are among the
// process's own (getrlimit): a container has further ones, above all for the number of processes and threads.
#pragma once

#include <cstdint>
#include <string>

namespace tensorferry {

// Why the process cannot start a thread now, and the remedy.
std::string why_no_thread();

// Why the process cannot allocate `nbytes` bytes now, and the remedy. The text is empty if the cause is not the address
// space limit (RLIMIT_AS). usual_nbytes is for system calls that allocate memory without reporting its size (for an
// io_uring ring, an AIO context); it is more than any of them allocates.
constexpr uint64_t usual_nbytes = uint64_t{8} << 20;
std::string why_no_memory(uint64_t nbytes = usual_nbytes);

}  // namespace tensorferry
