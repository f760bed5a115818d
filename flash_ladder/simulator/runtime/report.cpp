// The checker's side of Python's flash.inspect(): begin, take the arrays, hand over what was found, as JSON.
#include <cstdio>
#include <dlfcn.h>
#include <new>
#include <utility>

#include "checker.h"

namespace sim {

// A value in JSON
static std::string json(uint64_t x) { return std::to_string(x); }
static std::string json(const std::string& text) {
  std::string s = "\"";
  for (const char c : text) {
    char escaped[8];
    const char* format = c == '"' || c == '\\' ? "\\%c" : uint8_t(c) < 32 ? "\\u%04x" : "%c";
    snprintf(escaped, sizeof escaped, format, c);
    s += escaped;
  }
  return s + "\"";
}
static std::string json(const char* text) { return json(std::string(text)); }
static std::string json(uint3 v) { return "[" + json(v.x) + "," + json(v.y) + "," + json(v.z) + "]"; }
static std::string json(dim3 v) { return json(uint3{v.x, v.y, v.z}); }

template <class List, class F> static std::string json_list(const List& list, F each) {
  std::string s;
  for (const auto& x : list) s += (s.empty() ? "" : ",\n") + each(x);
  return "[" + s + "]";
}

using Field = std::pair<const char*, std::string>;
static std::string json_object(const std::vector<Field>& fields) {
  std::string s;
  for (auto& [name, value] : fields) s += (s.empty() ? "" : ",") + json(name) + ":" + value;
  return "{" + s + "}";
}

static std::string json(Kind kind) {
  if (is_atomic(kind)) return json("atomic");
  return json(kind == Kind::READ     ? "read"
              : kind == Kind::COPY   ? "copy"
              : kind == Kind::SOURCE ? "source"
              : kind == Kind::TMA_WRITE ? "tma write"
              : kind == Kind::TMA_READ ? "tma read"
              : kind == Kind::SEND ? "send"
              : kind == Kind::WGMMA ? "wgmma"
                                     : "write");
}

// ["library", offset]: Python makes it a line. The hook returns to the instruction after the call.
static std::string json_place(const void* pc) {
  Dl_info info;
  if (!dladdr(pc, &info) || !info.dli_fname) return "null";
  const auto offset = static_cast<const char*>(pc) - 1 - static_cast<char*>(info.dli_fbase);
  return "[" + json(info.dli_fname) + "," + json(uint64_t(offset)) + "]";
}

static std::string json(const Party& p) {
  return json_object({{"thread", json(p.thread)},
                      {"block", json(p.block)},
                      {"kind", p.access ? json(p.kind) : "null"},
                      {"access", json(uint64_t(p.access))},
                      {"file", json(p.site.file)},
                      {"line", json(uint64_t(p.site.line))}});
}

static std::string json(const Finding& f) {
  return json_object({{"what", json(f.what)},
                      {"kernel", json(f.kernel)},
                      {"array", std::to_string(f.array)},
                      {"element", json(f.element)},
                      {"offset", std::to_string(f.offset)},
                      {"bytes", json(f.bytes)},
                      {"parties", json_list(f.parties, [](const Party& p) { return json(p); })},
                      {"text", json(f.text)},
                      {"count", json(f.count)}});
}

static std::string json(const Request& r) {
  std::string s;
  for (int lane = 0; lane < WARP_SIZE; lane++)
    if (r.lanes >> lane & 1)
      s += (s.empty() ? "" : ",") + json(std::to_string(lane)) + ":" + json(uint64_t(r.offset[lane]));
  return "{" + s + "}";
}

static std::string json(const Counters& c, size_t access) {
  return json_object({{"access", json(uint64_t(access))},
                      {"access_bytes", json(uint64_t(c.example.access_bytes))},
                      {"requests", json(c.requests)},
                      {"lanes", json(c.lanes)},
                      {"bytes", json(c.bytes)},
                      {"unique", json(c.unique)},
                      {"units", json(c.units)},
                      {"ideal", json(c.ideal)},
                      {"worst", json(uint64_t(c.worst))},
                      {"shared_element", json(c.example_element)},
                      {"example", json(c.example)}});
}

static std::string json(const Barriers& b) {
  return json_object({{"file", json(b.site.file)},
                      {"line", json(uint64_t(b.site.line))},
                      {"name", json(b.name)},
                      {"count", json(b.count)}});
}

static std::string json(const Kernel& k) {
  std::string counters, traffic;
  for (size_t i = 0; i < k.counters.size(); i++)
    if (k.counters[i].requests) counters += (counters.empty() ? "" : ",\n") + json(k.counters[i], i);
  for (const Traffic& t : k.traffic)
    traffic += (traffic.empty() ? "[" : ",[") + json(t.unique_read) + "," + json(t.unique_written) + "]";
  return json_object({{"name", json(k.name)},
                      {"grid", json(k.grid)},
                      {"block", json(k.block)},
                      {"shared_bytes", json(k.shared_bytes)},
                      {"launches", json(k.launches)},
                      {"blocks", json(k.blocks)},
                      {"barriers", json_list(k.barriers, [](const Barriers& b) { return json(b); })},
                      {"accesses", json(k.accesses)},
                      {"unique", "[" + traffic + "]"},
                      {"counters", "[" + counters + "]"}});
}

// -------------------------------------------------------------------------------- called by Python
static void end_inspection() {
  delete checker;
  checker = nullptr;
  forget_requests();
}

extern "C" void sim_check_begin() {
  std::lock_guard<std::mutex> lock(checker_mutex);
  end_inspection();
  checker = new Checker;
  checker->accesses.push_back({nullptr, SHARED, Kind::READ});   // number 0: no access
}

extern "C" void sim_check_end() {
  std::lock_guard<std::mutex> lock(checker_mutex);
  end_inspection();
}

// Global memory that kernels may use from now on; its number, or -1 if there is too little memory. valid: a
// byte for each element, which says whether a kernel may touch it.
extern "C" int sim_check_array(const char* name, char* base, size_t bytes, int element_bytes,
                               const uint8_t* valid, int initialised) {
  std::lock_guard<std::mutex> lock(checker_mutex);
  try {
    auto m = std::make_unique<Memory>(name, base, bytes, element_bytes < 4 ? element_bytes / 2 : 2);
    const size_t cells_an_element = element_bytes >> m->shift;
    for (size_t i = 0; i < bytes >> m->shift; i++)
      if (valid[i / cells_an_element])
        m->state[i] = uint8_t(Memory::VALID | (initialised ? Memory::INITIALISED : 0));
    checker->arrays.push_back(std::move(m));
    return int(checker->arrays.size()) - 1;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

extern "C" void sim_check_forget(int array) {
  std::lock_guard<std::mutex> lock(checker_mutex);
  checker->arrays[array].reset();
}

extern "C" const char* sim_check_report() {
  static std::string text;
  std::lock_guard<std::mutex> lock(checker_mutex);
  text = json_object(
      {{"places", json_list(checker->accesses, [](const Access& a) { return json_place(a.pc); })},
       {"kinds", json_list(checker->accesses, [](const Access& a) { return json(a.kind); })},
       {"arrays", json_list(checker->accesses, [](const Access& a) { return std::to_string(a.array); })},
       {"kernels", json_list(checker->kernels, [](const Kernel& k) { return json(k); })},
       {"findings", json_list(checker->findings, [](const Finding& f) { return json(f); })},
       {"more_findings", checker->more_findings ? "true" : "false"}});
  return text.c_str();
}

}  // namespace sim
