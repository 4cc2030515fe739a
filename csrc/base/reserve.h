// Memory for the core's own small allocations, which could not be undone where they fail: those of its threads, and of
// the submission of a call that has begun. When operator new finds no memory there, a part of a reserve is freed, and
// it tries again (std::set_new_handler). The reserve is filled before a call changes anything; if that fails, the call
// raises MemoryError.
#pragma once

#include <cstddef>

namespace tensorferry {

// Allocate what is missing of the reserve; std::bad_alloc if that is impossible, or if `further_nbytes` are not free.
void fill_reserve(size_t further_nbytes = 0);

// In its scope, allocations of this thread may use the reserve.
class UsesReserve {
 public:
  UsesReserve();
  ~UsesReserve();
  UsesReserve(const UsesReserve&) = delete;
  UsesReserve& operator=(const UsesReserve&) = delete;
};

// Begin a thread of the core: it has this name, and may use the reserve until it ends.
void begin_core_thread(const char* name);

}  // namespace tensorferry
