// Which limit a refusal of the system comes from, as text for messages. Containers have limits that a process does not
// see in its own: of processes and threads above all.
#pragma once

#include <cstdint>
#include <string>

namespace tensorferry {

// Why the process may not start a thread now, and the remedy.
std::string why_no_thread();

// The same for so many bytes of memory; nothing where the limit of address space has room for them. What a call takes
// that does not say so (a ring, a context) is less than usual_nbytes.
constexpr uint64_t usual_nbytes = uint64_t{8} << 20;
std::string why_no_memory(uint64_t nbytes = usual_nbytes);

}  // namespace tensorferry
