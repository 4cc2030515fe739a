#include "device/library.h"

#include <dlfcn.h>
#include <stdlib.h>

namespace tensorferry {

Library::Library(const char* override_name, const std::vector<std::string>& candidates) {
  const char* chosen = ::getenv(override_name);
  const bool overridden = chosen != nullptr && *chosen != '\0';
  const std::vector<std::string> tried = overridden ? std::vector<std::string>{chosen} : candidates;
  for (const std::string& name : tried) {
    handle_ = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_ != nullptr) {
      path_ = name;
      reason_.clear();
      return;
    }
    // Report the first failure, which belongs to the system's own library. Its text names the file.
    const char* error = ::dlerror();
    if (reason_.empty()) reason_ = error ? error : name + " cannot be opened";
  }
  if (overridden) reason_ += " (the path is from " + std::string(override_name) + ")";
}

void* Library::symbol(const char* name) {
  void* found = ::dlsym(handle_, name);
  if (found == nullptr) reason_ = path_ + " has no function " + name + ": it is too old, or a different library";
  return found;
}

}  // namespace tensorferry
