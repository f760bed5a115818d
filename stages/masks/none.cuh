// Mask: none. Each query sees all keys.
struct Rule : AllKeys {
  using AllKeys::AllKeys;
};
